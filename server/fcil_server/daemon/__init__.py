"""The serving process: composition, commands and live status.

The *server* builds its parts and runs their loops; *gauges* are the numbers that pollers read,
rendered like all live answers from one `live.LiveStatus`.
"""
