"""Who may use the node, how much and when."""
