"""Class Gaussians: describing, pooling and sampling.

A *Gaussian* is the count, mean and covariance of one class's features; a *mixture* has several
for each class.
"""
