"""kvtier's store tiers inside the offloading of other engines, which move the pages themselves."""
