//! AppArmor rules that let the QEMU of a domain connect to the sockets of that domain's disks, and to no other socket
//! of Larder's.
//!
//! libvirt loads a profile for each domain that starts, `/etc/apparmor.d/libvirt/libvirt-UUID`. It creates that file
//! from a template if it does not exist, and keeps an existing one; the rules that follow from the domain's XML are
//! in another file, `libvirt-UUID.files`, which it rewrites each time. `virt-aa-helper` of libvirt 9.0 writes the
//! sockets of vhost-user network cards into that file, but not those of vhost-user disks. So the hook writes those
//! into the profile: libvirt calls the hook (`qemuProcessInit`) before it loads the profile
//! (`AppArmorGenSecurityLabel`).

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use super::backup::{self, DomainBackup};

/// Directory of the domains' profiles.
const PROFILES_DIRECTORY: &str = "/etc/apparmor.d/libvirt";

/// Template from which libvirt creates a profile.
const TEMPLATE: &str = "TEMPLATE.qemu";
/// Placeholder for the profile's name in the template.
const TEMPLATE_NAME_PLACEHOLDER: &str = "LIBVIRT_TEMPLATE";

/// First of the lines that enclose the rules.
const RULES_BEGIN: &str =
    "  # Larder: the sockets of the disks that it serves to this domain, written by its libvirt hook.";
/// Last of the lines that enclose the rules.
const RULES_END: &str = "  # Larder: end.";

/// Allows the QEMU of a domain to use the sockets of its disks, where libvirt has AppArmor profiles.
///
/// # Errors
/// The profile cannot be written, or a rule cannot name the sockets.
pub(super) fn allow(uuid: &str, sockets: &[&Path]) -> anyhow::Result<()> {
    let directory = Path::new(PROFILES_DIRECTORY);
    let Some(template) = DomainBackup::read(&directory.join(TEMPLATE))? else {
        return Ok(());
    };
    let rules = sockets.iter().map(|socket| rule(socket)).collect::<anyhow::Result<Vec<_>>>()?;
    let path = profile_path(uuid);
    let before = DomainBackup::read(&path)?;
    let name = format!("libvirt-{uuid}");
    let profile_without_rules = match &before {
        // libvirt recreates an empty profile, and would drop the rules.
        Some(text) if !text.trim().is_empty() => without_rules(text),
        _ => append_lines(
            &template.replace(TEMPLATE_NAME_PLACEHOLDER, &name),
            &[format!("  #include <libvirt/{name}.files>")],
        )
        .with_context(|| format!("{PROFILES_DIRECTORY}/{TEMPLATE}: it has no profile"))?,
    };
    let lines: Vec<String> = [RULES_BEGIN.to_owned()].into_iter().chain(rules).chain([RULES_END.to_owned()]).collect();
    let after = append_lines(&profile_without_rules, &lines)
        .with_context(|| format!("{}: it has no profile", path.display()))?;
    match before.as_ref() == Some(&after) {
        true => Ok(()),
        false => backup::write(&path, &after, 0o644, true),
    }
}

/// Removes the rules that [`allow`] wrote.
///
/// # Errors
/// The profile cannot be written.
pub(super) fn forbid(uuid: &str) -> anyhow::Result<()> {
    let path = profile_path(uuid);
    let Some(before) = DomainBackup::read(&path)? else {
        return Ok(());
    };
    let after = without_rules(&before);
    match after == before {
        true => Ok(()),
        false => backup::write(&path, &after, 0o644, true),
    }
}

fn profile_path(uuid: &str) -> PathBuf {
    Path::new(PROFILES_DIRECTORY).join(format!("libvirt-{uuid}"))
}

/// Returns the rule for a socket, whose path must have no character with a meaning in AppArmor. The paths that Larder
/// chooses have none.
fn rule(socket: &Path) -> anyhow::Result<String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-:+ ".contains(c);
    match socket.to_str() {
        Some(text) if text.starts_with('/') && text.chars().all(is_plain) => Ok(format!("  \"{text}\" rw,")),
        _ => bail!(
            "{}: an AppArmor rule cannot name it; give the socket a path of letters, digits, '.', '_' and '-'",
            socket.display()
        ),
    }
}

/// Returns the profile without the rules that this module wrote.
fn without_rules(profile: &str) -> String {
    let mut text = String::new();
    let mut is_inside = false;
    for line in profile.split_inclusive('\n') {
        match line.trim_end() {
            RULES_BEGIN => is_inside = true,
            RULES_END if is_inside => is_inside = false,
            _ if is_inside => {}
            _ => text.push_str(line),
        }
    }
    text
}

/// Inserts lines at the end of a profile's body; `None` if the profile has no closing brace.
fn append_lines(profile: &str, lines: &[String]) -> Option<String> {
    let end = profile.rfind('}')?;
    let (body, rest) = profile.split_at(end);
    let body = body.trim_end();
    Some(format!("{body}\n{}\n{rest}", lines.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = "#include <tunables/global>\n\nprofile libvirt-1 flags=(attach_disconnected) {\n  #include <abstractions/libvirt-qemu>\n  #include <libvirt/libvirt-1.files>\n}\n";

    /// Rules are written inside the profile, and removing them restores it byte for byte.
    #[test]
    fn rules_are_added_and_removed() {
        let lines = [
            RULES_BEGIN.to_owned(),
            rule(Path::new("/run/larder/web-vda.sock")).expect("can be named"),
            RULES_END.to_owned(),
        ];
        let with = append_lines(PROFILE, &lines).expect("it ends");
        assert!(with.ends_with(&format!("\n  \"/run/larder/web-vda.sock\" rw,\n{RULES_END}\n}}\n")), "{with}");
        assert_eq!(without_rules(&with), PROFILE);
        assert_eq!(without_rules(PROFILE), PROFILE);
        assert_eq!(append_lines("", &lines), None);
    }

    /// A path with AppArmor's special characters cannot widen its rule.
    #[test]
    fn rule_refuses_special_characters() {
        for path in ["/run/larder/*.sock", "/run/{a,b}", "/run/a\" rw, / rw,", "/run/a\n", "@{HOME}/x", "relative"] {
            rule(Path::new(path)).expect_err(path);
        }
    }
}
