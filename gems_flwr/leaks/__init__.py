"""What class moments give away: attacks on a node's own space, with its own data.

Arrays in, findings out; nothing here knows Flower. `membership` and `reconstruction` are the
attacks of the study ``leaks``; `inspection` turns them on a space that its owner is about to send.
"""
