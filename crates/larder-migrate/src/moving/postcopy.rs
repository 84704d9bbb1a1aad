//! Preconditions of post-copy at the destination, checked before a move begins and again before it switches over.
//!
//! In post-copy QEMU handles the page faults of its guest with a userfaultfd (QEMU,
//! docs/devel/migration/postcopy.rst). It registers its RAM only after the source has stopped the guest for good; if
//! the kernel then refuses, the VM is lost. So this module checks for everything that makes the kernel refuse.

use std::any::Any;
use std::ffi::OsString;
use std::path::Path;

use serde_json::{Value, json};

use crate::qmp::{ProcessIdentity, Qmp, QmpError};

/// `TMPFS_MAGIC` and `HUGETLBFS_MAGIC` of linux/magic.h: file systems whose pages userfaultfd(2) can serve.
const USERFAULTFD_FILE_SYSTEMS: [u32; 2] = [0x0102_1994, 0x9584_58f6];

/// Claim to the page faults of a QEMU's memory, released when it is dropped.
pub type FaultClaim = Box<dyn Any + Send>;

/// Other processes on this host that may handle the page faults of a QEMU's memory, such as a pager.
pub trait FaultHandlers: Send + Sync {
    /// Claims the faults of all memory of `qemu`, so that no other process starts to handle them during the claim.
    ///
    /// # Errors
    /// Another process handles them already, or that cannot be determined; the text includes what to do.
    fn claim(&self, qemu: ProcessIdentity) -> Result<FaultClaim, String>;
}

/// Stub for a host where no other process handles page faults.
pub struct NoFaultHandlers;

impl FaultHandlers for NoFaultHandlers {
    fn claim(&self, _: ProcessIdentity) -> Result<FaultClaim, String> {
        Ok(Box::new(()))
    }
}

/// Claims the page faults of the QEMU's memory, and checks that it can handle all of them itself.
///
/// # Errors
/// All reasons why it cannot.
pub(super) fn claim(qmp: &mut Qmp, handlers: &dyn FaultHandlers) -> Result<FaultClaim, Vec<String>> {
    let Some(process) = qmp.process() else {
        return Err(vec![
            "QEMU's process cannot be found, so it is not known whether a pager handles its memory, which post-copy \
             excludes: leave out --postcopy"
                .to_owned(),
        ]);
    };
    let claim = handlers.claim(process);
    let mut reasons: Vec<String> = claim.as_ref().err().cloned().into_iter().collect();
    let files = files_on_disk(qmp, process).map_err(|error| vec![error.to_string()])?;
    reasons.extend(files.into_iter().map(|path| {
        format!(
            "the destination's memory is in the file {path}, which is neither in a tmpfs nor in a hugetlbfs, and post-copy \
             supports no other files: use memory-backend-memfd there, or leave out --postcopy"
        )
    }));
    match claim {
        Ok(claim) if reasons.is_empty() => Ok(claim),
        _ => Err(reasons),
    }
}

/// Returns the files of memory backends on other file systems. A file whose file system cannot be determined is left
/// out.
fn files_on_disk(qmp: &mut Qmp, process: ProcessIdentity) -> Result<Vec<String>, QmpError> {
    let objects = match qmp.execute("qom-list", json!({"path": "/objects"})) {
        Err(QmpError::Refused { .. }) => return Ok(Vec::new()),
        objects => objects?,
    };
    let mut found = Vec::new();
    for object in objects.as_array().into_iter().flatten() {
        let (Some(name), Some("child<memory-backend-file>")) = (object["name"].as_str(), object["type"].as_str())
        else {
            continue;
        };
        let path = json!({"path": format!("/objects/{name}"), "property": "mem-path"});
        let path = match qmp.execute("qom-get", path) {
            Err(QmpError::Refused { .. }) => Value::Null,
            path => path?,
        };
        if let Some(path) = path.as_str()
            && is_on_disk(process, path) == Some(true)
        {
            found.push(path.escape_debug().to_string());
        }
    }
    Ok(found)
}

/// Returns whether `path`, in QEMU's mount namespace, is on another file system; `None` if that cannot be determined.
fn is_on_disk(process: ProcessIdentity, path: &str) -> Option<bool> {
    let mut root_path = OsString::from(format!("/proc/{}/root", process.pid));
    root_path.push(Path::new("/").join(path).as_os_str());
    let system = rustix::fs::statfs(Path::new(&root_path)).ok()?;
    Some(!USERFAULTFD_FILE_SYSTEMS.contains(&(system.f_type as u32)))
}
