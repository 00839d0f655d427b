"""Networks: freeze, trace, cut, ship the prefix, keep the head."""
