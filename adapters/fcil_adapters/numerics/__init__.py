"""Arrays over clients: weights, averages, class means and outliers.

Every function takes arrays and returns arrays; only `torch_numpy` knows torch.
"""
