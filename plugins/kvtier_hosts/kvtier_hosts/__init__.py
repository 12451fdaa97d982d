"""Store tiers below the caches of other engines: LMCache's server, SGLang's HiCache."""
