"""Models, backbones and statistics in other programs' formats: ONNX, timm, PEFT, safetensors.

A *model file* is a classifier with its backbone; a *backbone file* is the backbone alone; an
*adapter* is what was learned, to be put on a backbone.
"""
