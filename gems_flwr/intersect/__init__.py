"""Server side: a point of all nodes' spaces, or a proof that there is none; fine-tuning."""
