"""Tars that are compressed as a whole: unpacked once, and read at places from then on."""
