"""ONNX files of models and backbones.

A *model file* is a classifier with its backbone; a *backbone file* is the backbone alone.
"""
