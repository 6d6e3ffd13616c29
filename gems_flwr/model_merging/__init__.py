"""Merging trained models in one round: the peers that GEMS is compared with.

- `regmean`: every layer by least squares on the nodes' inputs (Jin et al. 2023).
- `fisher_mean`: every weight by how much each node's prediction depends on it (Matena & Raffel
  2022).
- `kfac`: the same for whole layers, with Kronecker factors (Tam et al. 2024).
- `fedfisher`: gradient steps from the average towards the minimum that these two solve for
  (Jhunjhunwala et al. 2024).
- `matching`: hidden neurons are matched one to one, then averaged (after Singh & Jaggi 2020).

A model is a mapping from names to numpy arrays, a chain of linear and convolutional layers as
`gems_flwr.networks.layers.weight_layers` sees it; a bias is the weight of one more input that is
always one. `measure` gathers on a node what a method needs besides the model, with the sums of
`layer_moments`; `layer_statistics` says what that is and checks it, `compressed_statistics` makes
it as small as the model; `merge_models` chooses the method.
"""
