"""Where the nodes of a simulation run: in this process, on Ray, all in lockstep."""
