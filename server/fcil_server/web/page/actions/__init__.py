"""What an operator may do on the page.

An *action* needs a *confirmation* that is good for one session and one use.
"""
