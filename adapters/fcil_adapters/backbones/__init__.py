"""The frozen backbone: loading, digest, engines and features.

A *backbone* is a pretrained network whose weights never change; an *engine* computes its
*features* (torch or onnxruntime); *probes* are fixed images whose features identify it.
"""
