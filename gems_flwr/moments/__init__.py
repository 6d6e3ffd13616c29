"""Node side: class moments of a layer's inputs, as many of them as the samples allow."""
