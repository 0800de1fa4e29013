"""Commands that a notebook's line magic and the command line share: words in, text or a table out."""
