"""`rayloom-engine bench gpu`: a rank on one GPU with random weights, compared with the card's limits.

command                flags, the run, the page
  -> limits            bandwidth and FLOP/s of the card
  -> rank              a model with random weights and its cache
  -> steps             times of decode steps, prefills and steps of a whole engine
  -> kernels           GPU time by kernel
  -> page              tables. Pure
"""
