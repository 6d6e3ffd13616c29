"""Secure summation: a server learns the sum of many nodes' numbers and nothing else of them.

Bonawitz et al. 2017, with the sparse graph of Bell et al. 2020. Pure: values in, values out; the
messages are `gems_flwr.wire.secure_messages`, the node's side of them
`gems_flwr.client.secure_sum_mod` and the server's `gems_flwr.server.secure_summing`.
"""
