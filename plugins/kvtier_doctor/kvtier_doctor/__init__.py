"""Commands that examine the tiers of a configuration file where they are: doctor, bench and fsck."""
