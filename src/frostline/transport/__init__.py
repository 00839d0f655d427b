"""What a trainer needs of a node, whichever way leads there."""
