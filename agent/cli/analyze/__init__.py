"""`hangwatch analyze`: the diagnosis from files, without a server and without the job."""
