"""The plugins that come with the core: a token database, codecs and an arena in the heap."""
