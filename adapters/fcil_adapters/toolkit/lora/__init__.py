"""Shared code of methods with LoRA and a linear head.

A *layer* adds a product of two small *factors* to a frozen weight; a *view* is a backbone with such
layers.
"""
