"""What carries pulls and pushes between workers and the server; the server itself knows of none of it."""
