"""One file per case; the hot statement is marked `# HOT`, `KIND` says what runs it."""
