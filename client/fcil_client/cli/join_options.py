"""Options that ``join`` shares with others: which server, what computes, what is declined.

What a client takes of its machine, and when, is in `cli.policy_options`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ServerOption = Annotated[
    str | None, typer.Option(help="The server's name or address, if there are several.")
]
EngineOption = Annotated[
    str, typer.Option(help="Runs the backbone: torch, onnx, or auto (torch if installed).")
]
DeviceOption = Annotated[
    str, typer.Option(help="auto, cpu, cuda or cuda:N; with onnx also tensorrt.")
]
PrecisionOption = Annotated[
    str, typer.Option(help="Training precision: fp32, amp (mixed), or auto (fp32).")
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(help="Local file with the backbone's weights: .safetensors, .onnx for onnx."),
]
MicroBatchOption = Annotated[
    int, typer.Option(min=0, help="At most this many images in one pass; 0: the method's batch.")
]
WorkTimeoutOption = Annotated[
    float,
    typer.Option(min=0, help="Abort training after this many seconds without progress; 0: never."),
]
MinNoiseOption = Annotated[
    float, typer.Option(min=0, help="Decline rounds with a smaller noise multiplier.")
]
MaxEpsilonOption = Annotated[
    float, typer.Option(min=0, help="Decline noised rounds beyond this epsilon; 0: no limit.")
]
MinCountOption = Annotated[int, typer.Option(min=1, help="Exclude classes with fewer images.")]
AllowPartialOption = Annotated[
    bool, typer.Option("--allow-partial", help="Accept noise on the statistics alone.")
]
