"""Charts as data, as SVG and as HTML.

A *spec* is a chart as numbers and words; the *templates* and the *static* files of the dashboard
and the reports are here.
"""
