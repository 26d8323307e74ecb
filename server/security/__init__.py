"""Who may call, by which certificates, and how much of the machine a server may take."""
