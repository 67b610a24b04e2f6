"""What is wrong with an installation and a launch, before a job finds out.

Every check is a function of facts, which the ranks gather first. So each rank does the same, and
what a check says can be tested without the machine that it is about.
"""

from mpistrat.doctor.examination import Report, examine
from mpistrat.doctor.findings import Finding, Level

__all__ = ["Finding", "Level", "Report", "examine"]
