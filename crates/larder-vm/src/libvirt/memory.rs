//! Guest memory that another process can map.

use super::xml::{Edits, Element};

const SOURCE: &str = "<source type='memfd'/>";
const ACCESS: &str = "<access mode='shared'/>";

/// Makes the domain's memory shared; the changes are added to `edits`.
///
/// # Errors
/// The domain requires private memory; a message for the user.
pub(super) fn make_shared(text: &str, domain: &Element, edits: &mut Edits) -> Result<(), String> {
    check_not_private(domain)?;
    let Some(backing) = domain.child("memoryBacking") else {
        let all = format!("<memoryBacking>\n  {SOURCE}\n  {ACCESS}\n</memoryBacking>");
        let before = ["currentMemory", "memory", "name"];
        let before = before.into_iter().find_map(|name| domain.child(name));
        let before = before.ok_or("it has neither a <memory> nor a <name>")?;
        edits.insert_after(text, before, &all);
        return Ok(());
    };
    // Huge pages are files themselves, which can be shared.
    let needs_source = backing.child("hugepages").is_none();
    let mut missing = Vec::new();
    match backing.child("source") {
        Some(source) if source.attribute("type") == Some("anonymous") => edits.replace(source.span.clone(), SOURCE),
        Some(_) => {}
        None if needs_source => missing.push(SOURCE),
        None => {}
    }
    match backing.child("access") {
        Some(access) if access.attribute("mode") == Some("shared") => {}
        Some(access) => edits.replace(access.span.clone(), ACCESS),
        None => missing.push(ACCESS),
    }
    match (missing.is_empty(), backing.span == backing.tag) {
        (true, _) => {}
        (false, false) => edits.append_child(text, backing, &missing.join("\n")),
        (false, true) => {
            let indentation = super::xml::indentation(text, backing);
            let inner: String = missing.iter().map(|line| format!("\n{indentation}  {line}")).collect();
            let all = format!("<memoryBacking>{inner}\n{indentation}</memoryBacking>");
            edits.replace(backing.span.clone(), all);
        }
    }
    Ok(())
}

/// Refuses settings for parts of the memory that override the setting for all of it.
fn check_not_private(domain: &Element) -> Result<(), String> {
    if domain.child("launchSecurity").is_some() {
        return Err("its memory is encrypted (<launchSecurity>), and Larder has to read it".to_owned());
    }
    let numa = domain.child("cpu").and_then(|cpu| cpu.child("numa"));
    let cells = numa.into_iter().flat_map(|numa| numa.children_named("cell"));
    for (number, cell) in cells.enumerate() {
        if cell.attribute("memAccess") == Some("private") {
            let id = cell.attribute("id").map_or_else(|| number.to_string(), str::to_owned);
            return Err(format!(
                "memAccess='private' of NUMA cell {id} prevents Larder from accessing the guest's memory; remove it, or change it to 'shared', with virsh edit"
            ));
        }
    }
    let modules = domain.child("devices").into_iter().flat_map(|all| all.children_named("memory"));
    match modules.into_iter().find(|it| it.attribute("access") == Some("private")) {
        Some(module) => Err(format!(
            "access='private' of a memory device ({}) prevents Larder from accessing the guest's memory; remove it, or change it to 'shared', with virsh edit",
            module.attribute("model").unwrap_or("dimm")
        )),
        None => Ok(()),
    }
}

/// Restores the memory's settings from `before`.
pub(super) fn restore(text: &str, now: &Element, before: &Element, before_text: &str, edits: &mut Edits) {
    let Some(backing) = now.child("memoryBacking") else {
        return;
    };
    let backing_before = before.child("memoryBacking");
    let is_set_by_larder = |child: &Element| match child.name.as_str() {
        "source" => child.attribute("type") == Some("memfd"),
        "access" => child.attribute("mode") == Some("shared"),
        _ => false,
    };
    if backing_before.is_none() && backing.children.iter().all(is_set_by_larder) {
        edits.remove(text, backing);
        return;
    }
    for child in backing.children.iter().filter(|child| is_set_by_larder(child)) {
        match backing_before.and_then(|backing| backing.child(&child.name)) {
            Some(old) => edits.replace(child.span.clone(), old.source(before_text)),
            None => edits.remove(text, child),
        }
    }
}

/// Returns whether a device of the domain needs shared memory, because another process serves it.
pub(super) fn needs_shared_memory(domain: &Element) -> bool {
    let Some(devices) = domain.child("devices") else {
        return false;
    };
    devices.children.iter().any(|device| match device.name.as_str() {
        "filesystem" => device.child("driver").and_then(|it| it.attribute("type")) == Some("virtiofs"),
        "interface" | "disk" => device.attribute("type") == Some("vhostuser"),
        "video" => device.child("driver").and_then(|it| it.attribute("name")) == Some("vhostuser"),
        _ => false,
    })
}
