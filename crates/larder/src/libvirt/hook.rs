//! `larder libvirt hook`: called by libvirt when a domain starts and ends.
//!
//! libvirt waits for the hook with the domain locked, so nothing here queries libvirt, and for a domain without
//! Larder's disks the hook only checks whether a file exists. Nothing is printed to standard output, which libvirt
//! would take for changed XML.

use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use larder_vm::libvirt::attach::identity;
use larder_vm::libvirt::xml::Element;
use larder_vm::libvirt::{socket_directory, vhost_user_sockets};
use larder_vm::vm::config::{VmConfig, vm_file_path};

use super::{apparmor, service};
use crate::cli::LibvirtHookArguments;
use crate::output::print_stderr;

/// Maximum size of the domain's XML that is read, in bytes.
const XML_BYTES_MAX: u64 = 16 << 20;

pub(crate) fn run(arguments: &LibvirtHookArguments) -> anyhow::Result<ExitCode> {
    let name = &arguments.name;
    match (arguments.operation.as_str(), arguments.moment.as_str()) {
        ("prepare", "begin") => start_server(name)?,
        // libvirtd was restarted, and kills the guest if the hook fails.
        ("reconnect", "begin") => {
            if let Err(error) = start_server(name) {
                print_stderr(&format!("{error:#}"));
            }
        }
        // The server is stopped whatever the VM's file contains by now.
        ("release", "end") => service::stop(name)?,
        _ => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts the server of the domain's disks, if it is Larder.
fn start_server(name: &Path) -> anyhow::Result<()> {
    // A name that no VM can have has no file.
    let Ok(path) = vm_file_path(name) else { return Ok(()) };
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
    let is_larder_socket = |socket: &Path| {
        let file = socket.file_name().unwrap_or_default().to_string_lossy();
        socket.parent() == Some(&socket_directory()) && file.starts_with(&begin)
    };
    if let Some(socket) = sockets.iter().find(|socket| is_larder_socket(socket) && !is_served(socket)) {
        bail!(
            "the domain has a disk at {}, and {} has none there; add it, or detach the domain and attach it again",
            socket.display(),
            path.display()
        );
    }
    if let Ok((_, uuid)) = identity(&domain) {
        let served: Vec<&Path> = sockets.iter().copied().filter(|socket| is_served(socket)).collect();
        // The host may allow the sockets in another way. If it does not, QEMU reports the socket that it cannot
        // connect to.
        if let Err(error) = apparmor::allow(&uuid, &served) {
            print_stderr(&format!("AppArmor may prevent QEMU from using its disks: {error:#}"));
        }
    }
    service::start(&config)
}
