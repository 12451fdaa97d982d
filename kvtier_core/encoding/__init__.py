"""From slots to frames and back: codecs and keyed seals."""
