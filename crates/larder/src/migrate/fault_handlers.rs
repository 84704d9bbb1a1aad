//! Exclusion of this host's pagers from a QEMU that receives memory by post-copy.

use larder_memory::target::claim_faults_for_postcopy;
use larder_migrate::moving::postcopy::{FaultClaim, FaultHandlers};
use larder_migrate::qmp::ProcessIdentity;
use rustix::process::Pid;

/// The pagers that `larder memory` starts.
pub(super) struct Pagers;

impl FaultHandlers for Pagers {
    fn claim(&self, qemu: ProcessIdentity) -> Result<FaultClaim, String> {
        let pid = Pid::from_raw(qemu.pid).ok_or("QEMU has no process ID")?;
        match claim_faults_for_postcopy(pid) {
            Ok(claim) => Ok(Box::new(claim)),
            Err(error) => Err(error.to_string()),
        }
    }
}
