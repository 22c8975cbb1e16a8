"""What everything stands on: errors, settings, the machine, files and stores."""
