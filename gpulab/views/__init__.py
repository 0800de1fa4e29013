"""Show what the analyses return: text, HTML, pictures, JSON, the live widget."""
