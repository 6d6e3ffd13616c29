"""What runs on a node: mods for any handler, the node's own limits, the ready ClientApp."""
