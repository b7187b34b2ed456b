prepend_path("PATH", "/opt/site/openmpi/5.0/bin")
prepend_path("LD_LIBRARY_PATH", "/opt/site/openmpi/5.0/lib")
