"""Shared code of methods with a linear classifier in closed form, from sums of features.

Torch-free. A *lift* maps a backbone's feature to the classifier's input.
"""
