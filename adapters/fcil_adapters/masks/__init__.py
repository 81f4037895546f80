"""Secure aggregation: the server learns the sum of a round's updates, and no single one.

Each client adds random numbers to its sums that cancel in the total (Bonawitz et al., Practical
Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017,
https://eprint.iacr.org/2017/281, with the sparse neighbourhoods of Bell et al., CCS 2020,
https://eprint.iacr.org/2020/704). A masked round takes five rounds of the run: `exchanges` lists
them. docs/secure-aggregation.md has the protocol and its threats.
"""
