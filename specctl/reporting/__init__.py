"""Reports: pictures, tables and pages, built only from result documents and run directories."""
