"""Commands that examine a configuration file and its tiers where they are: doctor, bench, fsck, clear and schema."""
