//! Required keys that a VM's file lacks for its disks: formats, and the files that images lead to. Files for earlier
//! versions of Larder lack them.

use std::io;
use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::{VmConfig, parse_image};
use crate::image::{Format, ImageAddress};

/// A disk that lacks keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskMissingKeys {
    /// Name of the disk.
    pub name: String,
    /// Image of the disk.
    pub image: ImageAddress,
    /// Format in the file, if any.
    pub format: Option<Format>,
    /// The file gives no other files for this image.
    pub lacks_chain: bool,
    /// Byte offset in the file at which lines can be added; `None` if the disk is an inline table.
    insert_offset: Option<usize>,
}

/// Returns the disks of a VM's file that lack a format, or lack keys for other files.
pub fn find_missing_keys(path: &Path, text: &str, config: &VmConfig) -> Vec<DiskMissingKeys> {
    let Ok(table) = DeTable::parse(text) else {
        return Vec::new();
    };
    let Some(DeValue::Array(disks)) = table.get_ref().get("disk").map(|disks| disks.get_ref()) else {
        return Vec::new();
    };
    let directory = path.parent().unwrap_or(Path::new("")).to_owned();
    let found = disks.iter().zip(&config.disks).filter_map(|(table, disk)| {
        let is_inline = text.get(table.span()).is_some_and(|text| text.starts_with('{'));
        let DeValue::Table(table) = table.get_ref() else {
            return None;
        };
        let image = table.get("image")?;
        let DeValue::String(name) = image.get_ref() else {
            return None;
        };
        let end = image.span().end;
        let line_end = text.get(end..)?.find('\n').map_or(text.len(), |at| end + at);
        Some(DiskMissingKeys {
            name: disk.name.clone(),
            image: parse_image(&directory, name).ok()?,
            format: disk.spec.format,
            lacks_chain: !table.contains_key("backing") && !table.contains_key("data-file"),
            insert_offset: (!is_inline).then_some(line_end),
        })
    });
    found.filter(|disk| disk.format.is_none() || disk.lacks_chain).collect()
}

/// Returns the text of the file with these lines added to these disks, each below its image.
///
/// # Errors
/// A disk is an inline table.
pub fn insert_lines(text: &str, lines: &[(DiskMissingKeys, String)]) -> io::Result<String> {
    let mut offsets = Vec::new();
    for (disk, lines) in lines {
        let place = disk.insert_offset.ok_or_else(|| {
            let name = &disk.name;
            io::Error::other(format!("disk {name} is an inline table: add these lines by hand"))
        })?;
        offsets.push((place, lines));
    }
    offsets.sort_by_key(|(place, _)| *place);
    let (mut all, mut from) = (String::new(), 0);
    for (place, lines) in offsets {
        all.push_str(&text[from..place]);
        all.push('\n');
        all.push_str(lines.trim_end_matches('\n'));
        from = place;
    }
    all.push_str(&text[from..]);
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_added_below_the_image() {
        let text = "[[disk]]\nname = \"a\"\nimage = \"/srv/a.img\" # the first\nserial = \"1\"\n\n[[disk]]\nimage = \"b.qcow2\"";
        let path = Path::new("/etc/larder/vms/x.toml");
        let config = VmConfig::parse(path, text).expect("is right");
        let found = find_missing_keys(path, text, &config);
        assert_eq!(found.len(), 2);
        assert_eq!(found[1].image, ImageAddress::Path("/etc/larder/vms/b.qcow2".into()));
        let lines =
            [(found[1].clone(), "format = \"qcow2\"".to_owned()), (found[0].clone(), "format = \"raw\"\n".to_owned())];
        let expected = "[[disk]]\nname = \"a\"\nimage = \"/srv/a.img\" # the first\nformat = \"raw\"\nserial = \"1\"\n\n[[disk]]\nimage = \"b.qcow2\"\nformat = \"qcow2\"";
        assert_eq!(insert_lines(text, &lines).expect("can be added"), expected);
    }

    #[test]
    fn inline_disk_is_not_edited() {
        let text = "disk = [{ image = \"/srv/a.img\" }]\n";
        let path = Path::new("/etc/larder/vms/x.toml");
        let config = VmConfig::parse(path, text).expect("is right");
        let found = find_missing_keys(path, text, &config);
        let lines = [(found[0].clone(), "format = \"raw\"".to_owned())];
        assert!(insert_lines(text, &lines).is_err());
    }
}
