"""A whole Flower deployment on this machine: real processes, TLS, authenticated nodes.

For the deployment demo and the deployment tests. `credentials` makes keys and certificates,
`federation` starts, registers, runs and stops.
"""
