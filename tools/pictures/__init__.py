"""Pictures of the documentation, drawn as SVG from code and from recorded runs."""
