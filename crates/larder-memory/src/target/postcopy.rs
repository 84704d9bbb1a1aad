//! Keeps pagers away from a QEMU that receives a VM by post-copy migration.
//!
//! In post-copy, QEMU registers all of its RAM with a userfaultfd of its own (QEMU,
//! docs/devel/migration/postcopy.rst). The kernel refuses that with `EBUSY` if a pager has registered the same
//! memory, at a time when neither QEMU has a complete VM. So the receiver claims the faults of the memory first, and
//! a pager does the same before it registers memory ([`larder_export::external_mapping::claim_faults`]). The second of
//! the two is refused.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;

use larder_export::external_mapping::claim_faults;
use rustix::process::Pid;

use super::files::ClassifiedMappings;
use super::{InspectOptions, Mapping, TargetError, candidate_mappings, read_descriptors, read_maps};

/// Claim to the faults of a process's memory. Dropping it releases the memory.
#[derive(Debug)]
pub struct FaultClaim {
    _files: Vec<File>,
}

/// Error of claiming the faults of a process's memory.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum FaultClaimError {
    #[error(
        "a pager manages the memory of QEMU (process {pid}), or another user of userfaultfd has registered it, and \
        post-copy must handle all of its page faults: detach the pager (larder memory detach), or leave out --postcopy",
        pid = .pid.as_raw_pid()
    )]
    InUse { pid: Pid },
    #[error("cannot check whether a pager manages the memory of QEMU, which would exclude post-copy: {0}")]
    Unknown(#[from] TargetError),
    #[error("process {pid}: cannot claim its memory for post-copy: {source}", pid = .pid.as_raw_pid())]
    Lock { pid: Pid, source: io::Error },
}

/// Claims the faults of all memory of process `pid` that a pager could manage, as long as the claim exists.
///
/// # Errors
/// See [`FaultClaimError`]. Nothing is claimed then.
pub fn claim_faults_for_postcopy(pid: Pid) -> Result<FaultClaim, FaultClaimError> {
    let options = InspectOptions::default();
    let mappings = read_maps(pid)?;
    let candidates: Vec<&Mapping> = candidate_mappings(&mappings, &options);
    let opened = ClassifiedMappings::classify(pid, &candidates, &mappings, &read_descriptors(pid)?, None);
    // A file that is mapped twice is claimed once, because each mapping has an open file description of its own here.
    let mut memories = opened.memories;
    memories.sort_by_key(|memory| (memory.location.device, memory.location.inode));
    memories.dedup_by_key(|memory| (memory.location.device, memory.location.inode));
    let files: Vec<File> = memories.into_iter().map(|memory| memory.file).collect();
    for file in &files {
        let claimed = claim_faults(file.as_fd()).map_err(|source| FaultClaimError::Lock { pid, source })?;
        if !claimed {
            return Err(FaultClaimError::InUse { pid });
        }
    }
    // Checked after the claim: a pager that attached before it is found by its descriptors in the process.
    if read_descriptors(pid)?.has_userfaultfd() {
        return Err(FaultClaimError::InUse { pid });
    }
    Ok(FaultClaim { _files: files })
}
