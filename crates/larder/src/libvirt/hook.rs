//! `larder libvirt hook`: what libvirt calls when a domain starts and ends.
//!
//! libvirt waits, with the domain locked, so nothing here asks libvirt, and a domain that has nothing of Larder's costs a
//! look for a file. Nothing is printed: to libvirt that would be another XML.

use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use larder_vm::libvirt::attach::identity;
use larder_vm::libvirt::xml::Element;
use larder_vm::libvirt::{socket_folder, vhost_user_sockets};
use larder_vm::vm::config::{VmConfig, path_of};

use super::{apparmor, service};
use crate::cli::LibvirtHookArguments;

/// The longest XML that is read.
const XML_BYTES_MAX: u64 = 16 << 20;

pub(crate) fn run(arguments: &LibvirtHookArguments) -> anyhow::Result<ExitCode> {
    let name = &arguments.name;
    match (arguments.operation.as_str(), arguments.moment.as_str()) {
        ("prepare", "begin") => start(name)?,
        // libvirtd was started anew, and kills the guest if this fails.
        ("reconnect", "begin") => {
            if let Err(error) = start(name) {
                eprintln!("larder: {error:#}");
            }
        }
        // Whatever its file says by now.
        ("release", "end") => service::stop(name)?,
        _ => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts what serves the domain's disks, if that is Larder.
fn start(name: &Path) -> anyhow::Result<()> {
    // Where the name can be none of a VM's, there is no file of it.
    let Ok(path) = path_of(name) else { return Ok(()) };
    if !path.exists() {
        return Ok(());
    }
    let mut xml = String::new();
    let read = std::io::stdin().lock().take(XML_BYTES_MAX).read_to_string(&mut xml);
    read.context("cannot read the domain's XML from standard input")?;
    let domain = Element::parse(&xml).context("the domain's XML, on standard input")?;
    let sockets: Vec<&Path> = vhost_user_sockets(&domain).collect();
    if sockets.is_empty() {
        return Ok(());
    }
    let config = VmConfig::read(&path)?;
    let is_served = |socket: &Path| config.disks.iter().any(|disk| disk.socket.as_deref() == Some(socket));
    if !sockets.iter().any(|socket| is_served(socket)) {
        return Ok(());
    }
    let begin = format!("{}-", config.name);
    let is_ours = |socket: &Path| {
        let file = socket.file_name().unwrap_or_default().to_string_lossy();
        socket.parent() == Some(&socket_folder()) && file.starts_with(&begin)
    };
    if let Some(socket) = sockets.iter().find(|socket| is_ours(socket) && !is_served(socket)) {
        bail!(
            "the domain has a disk at {}, and {} has none there; add it, or detach the domain and attach it again",
            socket.display(),
            path.display()
        );
    }
    if let Ok((_, uuid)) = identity(&domain) {
        let served: Vec<&Path> = sockets.iter().copied().filter(|socket| is_served(socket)).collect();
        // A host may allow them in another way. If it does not, QEMU says which socket it may not connect to.
        if let Err(error) = apparmor::allow(&uuid, &served) {
            eprintln!("larder: AppArmor may keep QEMU from its disks: {error:#}");
        }
    }
    service::start(&config)
}
