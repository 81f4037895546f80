"""Models and backbones in other programs' formats: ONNX files, and adapters for PEFT.

A *model file* is a classifier with its backbone; a *backbone file* is the backbone alone; an
*adapter* is what was learned, to be put on a backbone.
"""
