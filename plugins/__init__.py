"""The plugins that ship with moexport; they use the same entry points as plugins of others."""
