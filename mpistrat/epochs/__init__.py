"""Agreement of ranks: every collective is announced and compared before data moves."""
