"""W&B runs made from run folders, and the comparison as a W&B workspace."""
