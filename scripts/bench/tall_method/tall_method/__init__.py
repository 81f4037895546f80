"""HGP as it sends from clients with hundreds of images of a class, to measure its bytes.

With `cov = "full"` a class of few images sends its covariance's exact factor, which is smaller;
only from about half as many images as the features are wide does the packed triangle travel.
It is found where this directory's parent is on PYTHONPATH, as an installed package would be.
"""

from dataclasses import replace

from fcil_adapters.methods import hgp

METHOD = replace(hgp.METHOD, name="hgp_tall", learner="tall_method.learner:Learner")
