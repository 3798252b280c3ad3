"""Explanations of Slurm's reasons why a job waits."""

from __future__ import annotations

import pytest

from hpcaccel.submission.runs.pending_reasons import SOURCE, explain_reason, meaning

REASONS = """
None Prolog Priority Dependency Resources PartitionNodeLimit PartitionTimeLimit PartitionDown PartitionInactive
JobHeldAdmin JobHeldUser BeginTime Licenses AssociationJobLimit AssociationResourceLimit AssociationTimeLimit
Reservation ReqNodeNotAvail FrontEndDown SchedDefer NodeDown BadConstraints SystemFailure JobLaunchFailure
NonZeroExitCode RaisedSignal TimeLimit InactiveLimit InvalidAccount InvalidQOS QOSUsageThreshold QOSJobLimit
QOSResourceLimit QOSTimeLimit Cleaning QOSNotAllowed AccountNotAllowed DependencyNeverSatisfied QOSGrpCpuLimit
QOSGrpCPUMinutesLimit QOSGrpCPURunMinutesLimit QOSGrpJobsLimit QOSGrpMemLimit QOSGrpNodeLimit QOSGrpSubmitJobsLimit
QOSGrpWallLimit QOSMaxCpuPerJobLimit QOSMaxCpuMinutesPerJobLimit QOSMaxNodePerJobLimit QOSMaxWallDurationPerJobLimit
QOSMaxCpuPerUserLimit QOSMaxJobsPerUserLimit QOSMaxNodePerUserLimit QOSMaxSubmitJobPerUserLimit QOSMinCpuNotSatisfied
AssocGrpCpuLimit AssocGrpCPUMinutesLimit AssocGrpCPURunMinutesLimit AssocGrpJobsLimit AssocGrpMemLimit
AssocGrpNodeLimit AssocGrpSubmitJobsLimit AssocGrpWallLimit AssocMaxJobsLimit AssocMaxCpuPerJobLimit
AssocMaxCpuMinutesPerJobLimit AssocMaxNodePerJobLimit AssocMaxWallDurationPerJobLimit AssocMaxSubmitJobLimit
JobHoldMaxRequeue JobArrayTaskLimit BurstBufferResources BurstBufferStageIn BurstBufferOperation PowerNotAvail
PowerReserved AssocGrpUnknown AssocGrpUnknownMinutes AssocGrpUnknownRunMinutes AssocMaxUnknownPerJob
AssocMaxUnknownPerNode AssocMaxUnknownMinutesPerJob AssocMaxCpuPerNode AssocGrpMemMinutes AssocGrpMemRunMinutes
AssocMaxMemPerJob AssocMaxMemPerNode AssocMaxMemMinutesPerJob AssocGrpNodeMinutes AssocGrpNodeRunMinutes
AssocMaxNodeMinutesPerJob AssocGrpEnergy AssocGrpEnergyMinutes AssocGrpEnergyRunMinutes AssocMaxEnergyPerJob
AssocMaxEnergyPerNode AssocMaxEnergyMinutesPerJob AssocGrpGRES AssocGrpGRESMinutes AssocGrpGRESRunMinutes
AssocMaxGRESPerJob AssocMaxGRESPerNode AssocMaxGRESMinutesPerJob AssocGrpLicense AssocGrpLicenseMinutes
AssocGrpLicenseRunMinutes AssocMaxLicensePerJob AssocMaxLicenseMinutesPerJob AssocGrpBB AssocGrpBBMinutes
AssocGrpBBRunMinutes AssocMaxBBPerJob AssocMaxBBPerNode AssocMaxBBMinutesPerJob QOSGrpUnknown QOSGrpUnknownMinutes
QOSGrpUnknownRunMinutes QOSMaxUnknownPerJob QOSMaxUnknownPerNode QOSMaxUnknownPerUser QOSMaxUnknownMinutesPerJob
QOSMinUnknown QOSMaxCpuPerNode QOSGrpMemoryMinutes QOSGrpMemoryRunMinutes QOSMaxMemoryPerJob QOSMaxMemoryPerNode
QOSMaxMemoryPerUser QOSMaxMemoryMinutesPerJob QOSMinMemory QOSGrpNodeMinutes QOSGrpNodeRunMinutes
QOSMaxNodeMinutesPerJob QOSMinNode QOSGrpEnergy QOSGrpEnergyMinutes QOSGrpEnergyRunMinutes QOSMaxEnergyPerJob
QOSMaxEnergyPerNode QOSMaxEnergyPerUser QOSMaxEnergyMinutesPerJob QOSMinEnergy QOSGrpGRES QOSGrpGRESMinutes
QOSGrpGRESRunMinutes QOSMaxGRESPerJob QOSMaxGRESPerNode QOSMaxGRESPerUser QOSMaxGRESMinutesPerJob QOSMinGRES
QOSGrpLicense QOSGrpLicenseMinutes QOSGrpLicenseRunMinutes QOSMaxLicensePerJob QOSMaxLicensePerUser
QOSMaxLicenseMinutesPerJob QOSMinLicense QOSGrpBB QOSGrpBBMinutes QOSGrpBBRunMinutes QOSMaxBBPerJob QOSMaxBBPerNode
QOSMaxBBPerUser QOSMinBB DeadLine MaxBBPerAccount MaxCpuPerAccount MaxEnergyPerAccount MaxGRESPerAccount
MaxNodePerAccount MaxLicensePerAccount MaxMemoryPerAccount MaxUnknownPerAccount MaxJobsPerAccount
MaxSubmitJobsPerAccount PartitionConfig AccountingPolicy FedJobLock OutOfMemory MaxMemPerLimit AssocGrpBilling
AssocGrpBillingMinutes AssocGrpBillingRunMinutes AssocMaxBillingPerJob AssocMaxBillingPerNode
AssocMaxBillingMinutesPerJob QOSGrpBilling QOSGrpBillingMinutes QOSGrpBillingRunMinutes QOSMaxBillingPerJob
QOSMaxBillingPerNode QOSMaxBillingPerUser QOSMaxBillingMinutesPerJob MaxBillingPerAccount QOSMinBilling
ReservationDeleted ReservationInvalid Constraints
""".split()  # noqa: SIM905
"""All names in the table of Slurm's src/common/job_state_reason.c."""

ONE_OF_MANY = """
AssocGrpCpuLimit | the jobs of the account together have reached its limit for CPUs | waits
AssocGrpCPUMinutesLimit | the jobs of the account together have reached its limit for CPU minutes | does not
QOSMaxGRESPerUser | the QOS limit for GPUs or other generic resources per user is reached | waits
QOSMaxWallDurationPerJobLimit | the job's request exceeds the QOS limit for run time per job | does not
MaxSubmitJobsPerAccount | the QOS limit for jobs in the queue per account is reached | waits
QOSMinGRES | the job's request is below the QOS minimum for GPUs or other generic resources | does not
"""


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_an_explanation_and_advice(reason: str) -> None:
    said = meaning(reason)
    assert said.words
    assert said.advice
    assert SOURCE not in said.advice


@pytest.mark.parametrize("line", ONE_OF_MANY.strip().splitlines())
def test_limit_is_explained_from_the_parts_of_its_name(line: str) -> None:
    reason, words, waits = (part.strip() for part in line.split("|"))
    assert (meaning(reason).words, meaning(reason).waits) == (words, waits == "waits")


def test_reason_is_recognized_with_details_and_as_a_sentence() -> None:
    for text in ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "(ReqNodeNotAvail)", "ReqNodeNotAvail(Unavailable:n1)"):
        assert meaning(text).words == meaning("ReqNodeNotAvail").words
    assert meaning("launch failed requeued held").waits is False
    long = "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions"
    assert "down, drained" in meaning(long).words


def test_unknown_reason_points_to_slurms_source() -> None:
    assert SOURCE in meaning("SomethingNew").advice


def test_reason_is_explained_in_one_line() -> None:
    assert explain_reason("Priority") == "Priority: jobs with a higher priority are ahead of it"
    down = "ReqNodeNotAvail, UnavailableNodes:n[1-2]"
    assert explain_reason(down).startswith("ReqNodeNotAvail: nodes that the job needs are down")
    assert explain_reason("JobHeldUser").endswith("; it will not start on its own (release it: scontrol release JOB)")
    assert [explain_reason(reason) for reason in ("", "None", "SomethingNew")] == ["", "None", "SomethingNew"]
